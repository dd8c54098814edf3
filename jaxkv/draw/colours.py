"""One colour for each sequence, told apart by colour-blind readers too."""

# Okabe and Ito (2008), "Color Universal Design", without black.
PALETTE = ("#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7")
DARK = "#0072b2"
"""The one that white text is read on; on the others black."""


def colour_of(seq: int) -> str:
    """Return the colour of a sequence; seven sequences on, it comes again."""
    return PALETTE[seq % len(PALETTE)]


def text_colour_on(colour: str) -> str:
    """Return the colour of text that is read on a colour of the palette."""
    return "#ffffff" if colour == DARK else "#000000"
