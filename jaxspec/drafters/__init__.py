"""The drafters. `DRAFTERS` drives the command line, the lossless tests and the benchmark."""

from jaxspec.drafters.lookahead import Lookahead as Lookahead
from jaxspec.drafters.none import NoDraft as NoDraft
from jaxspec.drafters.prompt_lookup import PromptLookup as PromptLookup
from jaxspec.drafters.protocol import Drafter as Drafter
from jaxspec.drafters.protocol import Outcome as Outcome
from jaxspec.drafters.protocol import Proposal as Proposal

DRAFTERS: dict[str, type] = {
    "none": NoDraft,
    "promptlookup": PromptLookup,
    "lookahead": Lookahead,
}
