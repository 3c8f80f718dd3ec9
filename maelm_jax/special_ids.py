"""The special ids of a vocabulary, which the masks, the model and the data depend on."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class SpecialIds:
    """The special ids of a vocabulary, and which ids continue a word. All other ids are text."""

    bos: int  # <s>, at the start of every segment
    pad: int
    eos: int  # </s>, after every line, and where a row ends inside a line
    unk: int
    mask: int
    continues_word: tuple[bool, ...] = ()  # one per id; random tokens and word masking need it

    @classmethod
    def of_size(cls, size: int) -> "SpecialIds":
        """Returns the ids of a vocabulary trained by this project, every id a whole word."""
        return cls(0, 1, 2, 3, size - 1, (False,) * size)

    @property
    def never_masked(self) -> tuple[int, ...]:
        """The ids that are never masked by default."""
        return (self.bos, self.pad, self.eos)
