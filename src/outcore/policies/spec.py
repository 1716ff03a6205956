"""spec: read policies from text: `pooch` or `pooch{min_bytes=128KiB,early=true}`.

`outcore/spec.py` has the grammar.
"""

from __future__ import annotations

from outcore.errors import PolicyError
from outcore.policies.plugins import KnownPolicies
from outcore.policies.policy import Policy
from outcore.spec import SpecParser, spec_text

__all__ = ["parse_policy", "resolve", "spec_text"]


def _wrong(spec: str, reason: str) -> PolicyError:
    """The error for a spec that cannot be used."""
    return PolicyError(policy=spec, reason=reason)


_PARSER: SpecParser[Policy] = SpecParser(
    "policy", "pooch{min_bytes=128KiB}", KnownPolicies(), _wrong
)


def parse_policy(spec: str) -> Policy:
    """The policy that `spec` describes, built in or from another package.

    Raises PolicyError for:

    - text of another form,
    - an unknown name or option (with the nearest known one),
    - a value that an option cannot have,
    - a policy of another package that cannot be used.
    """
    return _PARSER.parse(spec)


def resolve(policy: str | Policy) -> Policy:
    """The policy itself, or the one that a spec describes. Raises as `parse_policy`."""
    return parse_policy(policy) if isinstance(policy, str) else policy
