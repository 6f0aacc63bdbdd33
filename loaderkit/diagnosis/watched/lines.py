"""Finds which lines of a script make its batches, from samples of them, and what can be done about the line that costs
most."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import Field

from loaderkit.diagnosis.verdict import Part

OPEN, DECODE, TRANSFORM, COLLATE, OTHER = "open/read", "decode", "transform", "collate", "other"
COLLATE_FN = "collate_fn"
_LEAST_SAMPLES = 20
_WORTH_TELLING = 10.0  # percent
_CHEAPER = {
    OPEN: "read less often and more at a time (loaderkit pack writes samples one behind the other into few files)",
    DECODE: "decode fewer pixels (images saved once at the size that training takes; of JPEGs Pillow's draft() before the "
    "pixels are asked for)",
    TRANSFORM: "do it once in advance, or for a whole batch at a time, on the GPU if there is one",
    COLLATE: "give collate_fn tensors of one shape, which torch.stack joins by one copy",
    OTHER: "do it once in advance, or for whole arrays in NumPy or torch",
}


class CostlyLine(Part):
    """One line, and the time in it and in what it calls: the user's own line if there is one, else the data set's."""

    place: str = Field(description='file and line, as in "train.py:41"')
    file: str
    line: int
    function: str
    source: str = Field(description="the line itself; empty where it cannot be read")
    part: str = Field(description="what torch had called: __getitem__, __getitems__, __iter__ or collate_fn")
    group: str = Field(description="open/read, decode, transform, collate or other")
    inside: str = Field(description="the function of a library in which most of that time was spent; empty: in none")
    percent: float = Field(description="of the time that was sampled")
    seconds: float = Field(description="the same as a time; that of several workers is summed")


class LineTimes(Part):
    """Which lines made the batches of a watched DataLoader, from samples of the threads that do it."""

    is_of_workers: bool = Field(description="worker processes were sampled, and not the loop's own thread")
    num_samples: int
    seconds: float = Field(description="in the data set and collate_fn, while they were sampled")
    cost_percent: float = Field(description="of a CPU, for sampling, in each process that was sampled")
    groups: dict[str, float] = Field(description="percent of the time by open/read, decode, ...; the longest first")
    lines: list[CostlyLine] = Field(description="at most 20, the longest first")

    @property
    def whose(self) -> str:
        """Whose time it is."""
        return "the workers' time" if self.is_of_workers else "the time to make batches"

    def costliest(self, wanted: Callable[[CostlyLine], bool] = lambda line: True) -> CostlyLine | None:
        """The longest of the wanted lines; None where no line stands out, or there are too few samples."""
        line = next(filter(wanted, self.lines), None)
        return (
            line if line is not None and line.percent >= _WORTH_TELLING and self.num_samples >= _LEAST_SAMPLES else None
        )

    def say(self, line: CostlyLine) -> str:
        """Where it is, what it says, and what it takes."""
        source = f" `{line.source}`" if line.source else ""
        doing = "" if line.group == OTHER else f" ({line.group})"
        return f"{line.place}{source}: {line.percent:.0f} % of {self.whose} in {line.part}{doing}"


def cheaper(line: CostlyLine, *, is_waiting: bool = False) -> str:
    """What to do about a line, and what that would bring at most. `is_waiting`: it waits for something other than a CPU."""
    share = min(0.99, line.percent / 100)
    times = f"{1 / (1 - share):.1f}" if share < 0.9 else "ten or more"
    how = "find out what it waits for" if is_waiting and line.group == OTHER else _CHEAPER[line.group]
    return f"make {line.place} cheaper, without which {times} times as many samples would be made: {how}"
