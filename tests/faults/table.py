"""Results for people."""

from faults.trial import Result


def line(result: Result) -> str:
    """A result in one line, and what is wrong below it."""
    head = (
        f"{'BAD ' if result.faults else 'ok  '} {result.cell.name:32} "
        f"{result.outcome:16} lost {_ranges(result.lost) or '-'}, "
        f"reduced {_ranges(result.reduced) or '-'}, {result.seconds:.0f} s"
    )
    return "\n".join([head, *(f"     {fault}" for fault in result.faults)])


def _ranges(rounds: tuple[int, ...]) -> str:
    """Round numbers, neighbours together: ``3, 7-9``."""
    found: list[list[int]] = []
    for index in sorted(rounds):
        if found and found[-1][-1] == index - 1:
            found[-1].append(index)
        else:
            found.append([index])
    return ", ".join(
        str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in found
    )


def page(lines: list[str]) -> str:
    raise NotImplementedError
