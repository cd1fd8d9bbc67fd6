"""Which stage is this rank, and who are its neighbours?"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """One rank's place in the line. One rank a stage for now, so stage and rank are the same number."""

    rank: int
    num_stages: int

    @property
    def stage(self) -> int:
        return self.rank

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    @property
    def previous_rank(self) -> int | None:
        """Sends activations to this rank; None on the first stage."""
        return None if self.is_first else self.rank - 1

    @property
    def next_rank(self) -> int | None:
        """Receives activations from this rank; None on the last stage."""
        return None if self.is_last else self.rank + 1
