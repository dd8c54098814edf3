"""Colours of sequences that colour-blind readers can distinguish."""

# Okabe and Ito (2008), "Color Universal Design", without black.
PALETTE = ("#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7")
DARK = "#0072b2"
"""Palette colour with white text; text on all other colours is black."""


def colour_of(seq: int) -> str:
    """Return the colour of a sequence; the seven colours of the palette repeat."""
    return PALETTE[seq % len(PALETTE)]


def text_colour_on(colour: str) -> str:
    """Return a readable text colour for a background colour."""
    return "#ffffff" if colour == DARK else "#000000"
