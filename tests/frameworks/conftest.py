from tests.probes.conftest import fake_group, folder, lone_group, observed

__all__ = ["fake_group", "folder", "lone_group", "observed"]
