"""Hooks of state dicts, as users register them."""

from __future__ import annotations

from typing import Any


def register_hooks(optimizer: Any, called: list[Any]) -> None:
    """Hooks of all kinds; those after saving and before loading return another dict."""

    def saved(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        called.append("saved")
        return {**state, "note": "saved"}

    def loading(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        called.append("loading")
        return {**state, "param_groups": [{**group, "lr": 0.25} for group in state["param_groups"]]}

    optimizer.register_state_dict_pre_hook(lambda _: called.append("saving"))
    optimizer.register_state_dict_post_hook(saved)
    optimizer.register_state_dict_post_hook(lambda *_: called.append("saved first"), prepend=True)
    optimizer.register_load_state_dict_pre_hook(loading)
    optimizer.register_load_state_dict_post_hook(
        lambda each: called.append(f"loaded {each.param_groups[0]['lr']}"), prepend=True
    )
