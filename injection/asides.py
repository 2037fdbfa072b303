"""What people say around their work: one stock of sentences for all turns.

Scripted agents say them in sound turns, rules in faulty ones, and benign rewrites add them, so none
of them tells one kind of turn from another. They hold no figure, no name, no verdict and no word of
a check, and may stand above or below any text.
"""

from __future__ import annotations

import random

ASIDES = (
    "Let me set this out.",
    "This is how I see it.",
    "Here is my part.",
    "I go by the task.",
    "That is all from me.",
    "Nothing else comes to mind.",
    "So much for now.",
    "That settles it.",
    "This is far enough.",
    "With this the matter is done.",
    "I go by my own reckoning.",
    "My own view stands.",
    "I stay with what I had in mind.",
    "I start from what is in front of me.",
    "There is not much earlier to build on.",
    "Beginning with the start.",
    "First things first.",
    "One thing after the other.",
    "Let me do this part with care.",
    "I go back to the start for this.",
    "Let us carry on from here.",
    "I will keep it short.",
    "I will keep this in order.",
    "Looks fine to me.",
    "Nothing speaks against it.",
    "Good.",
    "Done.",
    "All set.",
    "The work can start.",
    "No more is needed here.",
    "I have read all of it.",
    "I went through it once.",
    "A handy form reads better.",
    "In short terms.",
    "What counts for me is the task.",
    "I see this on its own terms.",
    "The interesting part comes last.",
    "Worth a closer look.",
    "I looked into what is asked.",
    "It comes to what one would expect.",
    "Some of this could be said in other ways.",
    "That depends on how one takes it, and I take it as it is written.",
    "I take this step myself.",
    "I did this with a pencil.",
    "Speaking for myself, this is clear.",
    "What is there so far is in order.",
    "I hand this in as it is.",
    "The others may add to this.",
    "One more pass over it, then I hand it on.",
    "I keep to my usual way.",
    "It took me a moment to see it.",
    "Please go on from this.",
    "I leave the rest to the others.",
    "This should do.",
    "As far as I can tell, this is all of it.",
    "I write down what I have.",
)


def pick_aside(rng: random.Random) -> str:
    """One of the sentences."""
    return rng.choice(ASIDES)
