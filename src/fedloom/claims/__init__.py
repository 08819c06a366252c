"""Claims of papers, tried one by one: what a paper says, what to run, and the rule that gives the verdict.

A claim is an entry of a YAML file of this folder, one file per paper (`fedloom.claims.entries` tells the keys). To add
one, write the entry; to add a paper, write a file. `fedloom.claims.trial` runs an entry, `fedloom.claims.rules` judges
the numbers, `fedloom.claims.report` shows both.
"""

from __future__ import annotations

from fedloom.claims.entries import SCALES, Claim, chosen, claims
from fedloom.claims.rules import RULES, Found, Verdict
from fedloom.claims.trial import Outcome, prepare

__all__ = ["RULES", "SCALES", "Claim", "Found", "Outcome", "Verdict", "chosen", "claims", "prepare"]
