"""planfile: save plans as files that people review, compare, check and use again.

One JSON file holds what a training run planned: a plan for each graph. Each move of a storage is
one line, with its reason. Overrides are in a separate file, and hold for any plan.
"""

from __future__ import annotations

from outcore.planfile.check import check_plan, check_saved, find, find_all
from outcore.planfile.diff import Change, PlanDiff, diff_files
from outcore.planfile.make import make_file, saved_plan
from outcore.planfile.nouns import Action, PlanFile, Rule, SavedPlan, Storage, Versions
from outcore.planfile.overridden import Overridden
from outcore.planfile.overrides import check_rules, forced, has_effect
from outcore.planfile.store import file_text, load_overrides, load_plans, save_plans, schema_text

__all__ = [
    "Action",
    "Change",
    "Overridden",
    "PlanDiff",
    "PlanFile",
    "Rule",
    "SavedPlan",
    "Storage",
    "Versions",
    "check_plan",
    "check_rules",
    "check_saved",
    "diff_files",
    "file_text",
    "find",
    "find_all",
    "forced",
    "has_effect",
    "load_overrides",
    "load_plans",
    "make_file",
    "save_plans",
    "saved_plan",
    "schema_text",
]
