import pytest

FOUND = {
    "members only": """
        if rank in [0, 1]:
            group = dist.new_group([0, 1])  # here
        """,
    "a mesh on some ranks": """
        from torch.distributed.device_mesh import init_device_mesh
        if local_rank == 0:
            mesh = init_device_mesh("cuda", (2,))  # here
        """,
    "behind a return": """
        def main(rank):
            if rank != 0:
                return None
            return dist.new_group([0])  # here
        """,
    "through a function": """
        def make(ranks):
            return dist.new_group(ranks)

        if rank in ranks:
            group = make(ranks)  # here
        """,
}
SILENT = {
    "every group on every rank": """
        for ranks in all_ranks:
            group = dist.new_group(ranks)
            if rank in ranks:
                mine = group
        """,
    "members only, with local synchronisation": """
        if rank in [0, 1]:
            group = dist.new_group([0, 1], use_local_synchronization=True)
        """,
    "one in each branch": """
        if rank < 2:
            group = dist.new_group([0, 1])
        else:
            group = dist.new_group([2, 3])
        """,
}


@pytest.mark.parametrize("program", FOUND.values(), ids=FOUND)
def test_a_group_that_some_ranks_do_not_create_is_found(marked, program):
    assert marked("COL008", program)


@pytest.mark.parametrize("program", SILENT.values(), ids=SILENT)
def test_correct_programs_are_silent(marked, program):
    assert not marked("COL008", program)
