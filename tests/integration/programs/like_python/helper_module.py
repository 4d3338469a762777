"""A module beside the scripts, found through `sys.path[0]`."""


def greet(name: str) -> str:
    """Return a greeting."""
    return f"hello {name} from {__name__}"
