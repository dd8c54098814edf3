"""Fixtures of the command line and of chats, for every file of this folder."""

from tests.models.command_line import command, letters, letters_model  # noqa: F401
from tests.models.speaking import speaker, two_turns  # noqa: F401
