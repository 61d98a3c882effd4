"""Lines that read data of which some are NaN, as a program does that was written for them."""

from __future__ import annotations

from fuzz_grower import HOLES, Grower, Maker
from fuzz_makers import expr


def _filled(g: Grower) -> str:
    a = g.last(8, dims=1)
    return g.of(
        f"torch.nan_to_num({HOLES}, nan=0.5)",
        f"torch.where({HOLES}.isnan(), 0.25, {HOLES})",
        f"{HOLES}.masked_fill({HOLES}.isnan(), 0.0)",
        f"{HOLES}.nan_to_num(0.0) + {a}.mean()",
        f"F.linear({HOLES}.nan_to_num(0.0), w0, w1)",
    )


def _masked(g: Grower) -> str:
    a = g.shaped(*g.eval(HOLES).shape)
    return g.of(
        f"{a}.masked_fill({HOLES}.isnan(), 0.0)",
        f"torch.where({HOLES}.isnan(), {a}, {HOLES}.nan_to_num(0.0) * {a})",
        f"{a} * (~{HOLES}.isnan()).to({a}.dtype)",
        f"F.mse_loss({a} * ~{HOLES}.isnan(), {HOLES}.nan_to_num(0.0))",
    )


def _reduced(g: Grower) -> str:
    return g.of(
        f"torch.nanmean({HOLES}, {g.of(0, 1)})",
        f"torch.nansum({HOLES}, {g.of(0, 1)})",
        f"{HOLES}.isnan().sum(0)",
        f"torch.nanmean({HOLES} * 0.5)",
    )


HOLED: dict[str, Maker] = {
    "holes_filled": expr(_filled),
    "holes_masked": expr(_masked),
    "holes_reduced": expr(_reduced),
}
