import pytest

HELPERS = """
    import torch.distributed as dist

    def is_ready():
        if not dist.is_available():
            return False
        return dist.is_initialized()

    def get_rank():
        if not is_ready():
            return 0
        return dist.get_rank()

    def is_main():
        return get_rank() == 0

    def start_distributed():
        dist.init_process_group("gloo")
    """
FOUND = {
    "a test in place": """
        if not dist.is_initialized() or dist.get_rank() == 0:  # here
            download()
        dist.init_process_group("nccl")
        """,
    "a helper": """
        from helpers import is_main
        def main():
            if is_main():  # here
                download()
            dist.init_process_group("nccl")
        """,
    "a flag": """
        rank = dist.get_rank() if dist.is_initialized() else 0  # here
        dist.init_process_group("nccl")
        """,
    "a function that creates the group": """
        import helpers
        def main():
            if helpers.get_rank() == 0:  # here
                download()
            helpers.start_distributed()
        """,
}
SILENT = {
    "behind it": """
        from helpers import is_main
        def main():
            dist.init_process_group("nccl")
            if is_main():
                download()
        """,
    "the environment": """
        if int(os.environ["RANK"]) == 0:
            download()
        dist.init_process_group("nccl")
        """,
    "a helper that asks the environment": """
        def get_rank():
            if not dist.is_initialized():
                return int(os.environ.get("RANK", 0))
            return dist.get_rank()

        if get_rank() == 0:
            download()
        dist.init_process_group("nccl")
        """,
    "a message": """
        from helpers import is_main
        def main():
            if is_main():
                print("starting")
            dist.init_process_group("nccl")
        """,
    "a group that may exist already": """
        from helpers import is_main
        def main():
            if is_main():
                download()
            if not dist.is_initialized():
                dist.init_process_group("nccl")
        """,
    "another branch": """
        from helpers import is_main
        def main(mode):
            if mode == "prepare":
                if is_main():
                    download()
            else:
                dist.init_process_group("nccl")
        """,
}


@pytest.mark.parametrize("program", FOUND.values(), ids=FOUND)
def test_a_question_that_comes_too_early_is_found(marked, program):
    assert marked("BAR005", program, helpers=HELPERS)


@pytest.mark.parametrize("program", SILENT.values(), ids=SILENT)
def test_correct_programs_are_silent(marked, program):
    assert not marked("BAR005", program, helpers=HELPERS)


def test_a_function_that_asks_is_followed(lint):
    (found,) = lint(
        "BAR005",
        """
        from helpers import get_rank

        def fetch():
            if get_rank() == 0:
                download()

        def main():
            fetch()
            dist.init_process_group("nccl")
        """,
        helpers=HELPERS,
    )
    assert (
        "fetch() asks get_rank() before dist.init_process_group (line 16) creates" in found.message
    )
    assert [place.line for place in found.related] == [16, 11]
