"""The drafters. `DRAFTERS` drives the command line, the lossless tests and the benchmark."""

from typing import Any

from jaxspec.drafters.auto import Auto as Auto
from jaxspec.drafters.lookahead import Lookahead as Lookahead
from jaxspec.drafters.none import NoDraft as NoDraft
from jaxspec.drafters.prompt_lookup import PromptLookup as PromptLookup
from jaxspec.drafters.protocol import Drafter as Drafter
from jaxspec.drafters.protocol import Outcome as Outcome
from jaxspec.drafters.protocol import Proposal as Proposal
from jaxspec.drafters.protocol import current_tokens as current_tokens

DRAFTERS: dict[str, type] = {
    "none": NoDraft,
    "promptlookup": PromptLookup,
    "lookahead": Lookahead,
    "auto": Auto,
}

# The settings that decoded fastest, found by `scripts/benchmark.py decode --sweep`. On a CPU every
# row of a block costs, on a GPU some dozens are nearly free.
DEFAULT_SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "cpu": {
        "promptlookup": {"num_draft_tokens": 7},
        "lookahead": {"window_size": 1, "ngram_size": 2, "num_candidates": 1},
        "auto": {"num_draft_tokens": (3, 7)},
    },
    "gpu": {
        "promptlookup": {"num_draft_tokens": 15},
        "lookahead": {"window_size": 7, "ngram_size": 7, "num_candidates": 7},
        "auto": {"num_draft_tokens": (7, 15)},
    },
}


def make_drafter(spec: str, *, platform: str, **settings: Any) -> Drafter | Auto:
    """Return the drafter of a mode with the platform's default settings, some replaced.

    Args:
      spec: a key of `DRAFTERS`.
      platform: "cpu", "gpu" or another of JAX's, which gets those of a GPU.
      **settings: fields of the drafter that differ from the defaults.

    Raises:
      ValueError: a setting is out of range.
    """
    defaults = DEFAULT_SETTINGS.get(platform, DEFAULT_SETTINGS["gpu"]).get(spec, {})
    return DRAFTERS[spec](**(defaults | settings))
