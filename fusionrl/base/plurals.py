"""Numbers in sentences."""


def counted(number: int, noun: str) -> str:
    """Return "1 node", "2 nodes", "0 nodes"."""
    return f"{number} {noun}{'s' * (number != 1)}"
