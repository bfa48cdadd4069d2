"""What whoever runs a service says about scaling: which policy, what things cost, who may have how much. A TOML file.

policy = "model_first"        # or cachew, utilization, buffers: yardsticks

[rent]                        # an hour's prices; without them 3 % of batch time decides what a worker is worth
worker_per_h = 0.08
trainer_per_h = 4.5

[principals.alice]            # by the name of a key
quota = 8                     # workers for all her jobs together
weight = 2.0                  # her share, beside those of others
most_priority = 1             # a job that asks for more gets this one

[others]                      # those who are not named
quota = 4
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

import msgspec

from penstock.core.conversion import Conversion
from penstock.core.errors import InvalidArgumentError
from penstock.policies.scaling.records import Rent

PolicyName: TypeAlias = Literal["model_first", "cachew", "utilization", "buffers"]


class PrincipalRules(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What one principal may have."""

    quota: float | None = None
    """Workers of all its jobs that say how many they want; None: as many as there are."""
    weight: float = 1.0
    most_priority: int | None = None

    def __post_init__(self) -> None:
        if not self.weight > 0 or (self.quota is not None and not self.quota >= 0):
            raise ValueError(f"weight={self.weight} must be above 0, and quota={self.quota} not below")


class ScalingRules(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """See the module."""

    policy: PolicyName = "model_first"
    rent: Rent | None = None
    principals: dict[str, PrincipalRules] = {}
    others: PrincipalRules = PrincipalRules()

    def of(self, principal: str) -> PrincipalRules:
        return self.principals.get(principal, self.others)


DEFAULT_RULES = ScalingRules()


def parse_rules(text: str, where: str) -> ScalingRules:
    """Return the rules of a file.

    >>> parse_rules('policy = "cachew"', "rules.toml").policy
    'cachew'
    """
    import tomllib  # slow to import, and most services have no such file

    try:
        return rules_of(tomllib.loads(text), where)
    except tomllib.TOMLDecodeError as error:
        raise InvalidArgumentError(f"{where}: {error}; it should be TOML") from None


def rules_of(given: Mapping[str, Any], where: str = "scaling") -> ScalingRules:
    """Return rules that are written as a file has them.

    >>> rules_of({"others": {"quota": 2}}).of("alice").quota
    2.0
    >>> rules_of({"policy": "magic"}, "rules.toml")
    Traceback (most recent call last):
        ...
    penstock.core.errors.InvalidArgumentError: rules.toml: Invalid enum value 'magic' - at `$.policy`; the policies \
are model_first, cachew, utilization, buffers
    """
    try:
        return _rules(dict(given))
    except (msgspec.ValidationError, ValueError, TypeError) as error:
        remedy = "docs/scaling.md shows what may be said"
        if "policy" in str(error):
            remedy = f"the policies are {', '.join(get_args(PolicyName))}"
        raise InvalidArgumentError(f"{where}: {error}; {remedy}") from None


_rules = Conversion(ScalingRules)
