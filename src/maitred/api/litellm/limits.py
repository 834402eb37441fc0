"""Limits in LiteLLM's fields: what a body asks for as limits of ours, and limits of ours as its fields.

A budget window is one of the calendar here: a day, a week or a month. LiteLLM's windows of 1, 7 and 30 days, and of one
month, begin there, too, so nothing else stands for another window.
"""

from collections.abc import Iterable, Mapping, Sequence
from secrets import token_hex
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from maitred.core.errors import InvalidRequest
from maitred.core.limits import Limit, LimitKind
from maitred.core.usage import to_nano_usd, to_usd
from maitred.store.directory import DirectoryStore
from maitred.wire.litellm.requests import LimitFields, ModelBudget
from maitred.wire.openai.faults import format_value

_WINDOWS = {
    **dict.fromkeys(("1d", "24h", "daily"), LimitKind.USD_PER_DAY),
    **dict.fromkeys(("7d", "1w", "weekly"), LimitKind.USD_PER_WEEK),
    **dict.fromkeys(("30d", "1mo", "monthly"), LimitKind.USD_PER_MONTH),
}
_DURATIONS = {LimitKind.USD_PER_DAY: "1d", LimitKind.USD_PER_WEEK: "7d", LimitKind.USD_PER_MONTH: "30d"}
_RATES = {
    "rpm_limit": LimitKind.REQUESTS_PER_MINUTE,
    "tpm_limit": LimitKind.TOKENS_PER_MINUTE,
    "max_parallel_requests": LimitKind.CONCURRENT_REQUESTS,
}
_MODEL_RATES = {"model_rpm_limit": LimitKind.REQUESTS_PER_MINUTE, "model_tpm_limit": LimitKind.TOKENS_PER_MINUTE}
_LEAST_NUSD = 1
_SPEND = tuple(kind for kind in LimitKind if kind.spend)
_Slot = tuple[str | None, LimitKind, bool]
"""Model, kind and hardness: a subject has one limit of each."""


def wanted_limits(fields: LimitFields, present: Iterable[Limit] = ()) -> tuple[dict[_Slot, int], set[_Slot]]:
    """Returns the limits that a body sets, and the slots of limits that it takes away.

    Args:
        fields: The body.
        present: The limits that there are, for what the body does not name: a new amount keeps the window.

    Raises:
        InvalidRequest: There is no such window, or a rate is 0.
    """
    wanted: dict[_Slot, int] = {}
    removed: set[_Slot] = set()
    for name, kind in _RATES.items():
        value = getattr(fields, name)
        if value is not UNSET:
            removed.add((None, kind, True))
            if value is not None:
                wanted[None, kind, True] = _rate(name, value)
    _want_budgets(fields, present, wanted, removed)
    present_slots = {_slot_of(limit) for limit in present}
    if (budgets := fields.model_max_budget) is not UNSET:
        removed |= {slot for slot in present_slots if slot[0] is not None and slot[1].spend}
        for model, budget in (budgets or {}).items():
            kind, amount = _model_budget(model, budget)
            wanted[model, kind, True] = max(to_nano_usd(amount), _LEAST_NUSD)
    for name, kind in _MODEL_RATES.items():
        rates = getattr(fields, name)
        if rates is not UNSET:
            removed |= {slot for slot in present_slots if slot[0] is not None and slot[1] is kind}
            wanted |= {(model, kind, True): _rate(f"{name}.{model}", rate) for model, rate in (rates or {}).items()}
    return wanted, removed


def _want_budgets(fields: LimitFields, present: Iterable[Limit], wanted: dict[_Slot, int], removed: set[_Slot]) -> None:
    known = fields_of(present)
    window = fields.budget_duration if fields.budget_duration is not UNSET else known["budget_duration"]
    for name, hard in (("max_budget", True), ("soft_budget", False)):
        value = getattr(fields, name)
        if value is UNSET:
            if fields.budget_duration is UNSET or known[name] is None:
                continue
            value = known[name]
        removed |= {(None, kind, hard) for kind in _SPEND}
        if value is not None:
            wanted[None, _kind_of("budget_duration", window), hard] = max(to_nano_usd(value), _LEAST_NUSD)
    if fields.budget_duration not in (UNSET, None) and not any(slot[1].spend and slot[0] is None for slot in wanted):
        raise InvalidRequest(
            "budget_duration is the window of a budget. Send max_budget, too.", param="budget_duration"
        )


def fields_of(limits: Iterable[Limit]) -> dict[str, Any]:
    """Returns limits of one subject in LiteLLM's fields; a field without a limit is None."""
    fields: dict[str, Any] = {
        **dict.fromkeys(("max_budget", "soft_budget", "budget_duration", *_RATES)),
        "model_max_budget": {},
        "model_rpm_limit": {},
        "model_tpm_limit": {},
    }
    names = {kind: name for name, kind in _RATES.items()}
    model_names = {kind: name for name, kind in _MODEL_RATES.items()}
    for limit in limits:
        if limit.kind.spend:
            duration = _DURATIONS.get(limit.kind)
            if limit.model is not None:
                budget = {"budget_limit": to_usd(limit.value), "time_period": duration}
                fields["model_max_budget"][limit.model] = budget
            else:
                fields["max_budget" if limit.hard else "soft_budget"] = to_usd(limit.value)
                fields["budget_duration"] = duration
        elif limit.model is None and limit.kind in names:
            fields[names[limit.kind]] = limit.value
        elif limit.model is not None and limit.kind in model_names:
            fields[model_names[limit.kind]][limit.model] = limit.value
    return fields


def new_limits(subject: str, wanted: Mapping[_Slot, int]) -> list[Limit]:
    """Returns limits for a subject that has none."""
    return [
        Limit(id=f"lim-{token_hex(8)}", subject=subject, kind=kind, value=value, model=model, hard=hard)
        for (model, kind, hard), value in wanted.items()
    ]


async def apply_limits(store: DirectoryStore, subject: str, fields: LimitFields) -> None:
    """Sets the limits of a subject that a body names; others stay.

    Raises:
        InvalidRequest: As `wanted_limits`.
        StoreUnavailable: The store cannot be reached.
    """
    present = await all_limits(store, subject)
    wanted, removed = wanted_limits(fields, present)
    by_slot = {_slot_of(limit): limit for limit in present}
    for slot in removed - wanted.keys():
        if slot in by_slot:
            await store.delete_limit(by_slot[slot].id)
    for slot, value in wanted.items():
        known = by_slot.get(slot)
        if known is None:
            await store.put_limit(*new_limits(subject, {slot: value}))
        elif known.value != value:
            await store.put_limit(replace(known, value=value))


async def all_limits(store: DirectoryStore, subject: str) -> Sequence[Limit]:
    """Returns all limits of a subject."""
    limits = await store.limits(subject, "", 1000)
    while limits and len(limits) % 1000 == 0:
        limits += (more := await store.limits(subject, limits[-1].id, 1000))
        if not more:
            break
    return limits


def _slot_of(limit: Limit) -> _Slot:
    return limit.model, limit.kind, limit.hard


def _model_budget(model: str, budget: float | ModelBudget) -> tuple[LimitKind, float]:
    if not isinstance(budget, ModelBudget):
        return LimitKind.USD_TOTAL, budget
    amount = budget.budget_limit if budget.budget_limit is not None else budget.max_budget
    if amount is None:
        raise InvalidRequest(f"The budget of {model[:64]} needs a budget_limit, in dollars.", param="model_max_budget")
    return _kind_of("model_max_budget", budget.time_period or budget.budget_duration), amount


def _kind_of(param: str, window: str | None) -> LimitKind:
    if window is None:
        return LimitKind.USD_TOTAL
    if window not in _WINDOWS:
        raise InvalidRequest(
            f"{param} must be 24h, 7d or 30d (a day, a week from Monday, a month, of UTC), or left out for a budget in "
            f"all; got {format_value(window)}.",
            param=param,
        )
    return _WINDOWS[window]


def _rate(name: str, value: int) -> int:
    if value == 0:
        raise InvalidRequest(f"{name} must be 1 or more. To let nothing through, block the key or team.", param=name)
    return value
