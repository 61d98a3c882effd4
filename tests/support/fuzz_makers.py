"""How a line is made: of a template, or of an expression."""

from __future__ import annotations

from collections.abc import Callable

from fuzz_grower import Drawn, Grower, Maker


def unary(template: str) -> Maker:
    def make(g: Grower) -> Drawn:
        a = g.any(dims=0)
        return f"{g.new()} = {template.replace('%s', a)}"

    return make


def binary(template: str, second: Callable[[Grower, str], str] = Grower.broad) -> Maker:
    def make(g: Grower) -> Drawn:
        a = g.any()
        text = template.replace("{a}", a)
        for name in ("{b}", "{c}"):
            if name in text:
                text = text.replace(name, second(g, a))
        if "{m}" in text:
            text = text.replace("{m}", g.mask(a))
        return f"{g.new()} = {text}"

    return make


def reduction(template: str) -> Maker:
    def make(g: Grower) -> Drawn:
        a = g.any()
        keep = "True" if g.choose(2) else "False"
        text = template.replace("{a}", a).replace("{d}", str(g.dim(a))).replace("{k}", keep)
        return f"{g.new()} = {text}"

    return make


def expr(make: Callable[[Grower], str]) -> Maker:
    def line(g: Grower) -> Drawn:
        text = make(g)
        return f"{g.new()} = {text}"

    return line


def write(template: str) -> Maker:
    """{t}: the target, sometimes part of it; {b}: broadcast to it; {m}: a mask."""

    def make(g: Grower) -> Drawn:
        t = g.target()
        if g.choose(3) == 2:
            t = g.slice(t)
        text = template.replace("{t}", t)
        if "{b}" in text:
            text = text.replace("{b}", g.broad(t))
        if "{c}" in text:
            text = text.replace("{c}", g.broad(t))
        if "{m}" in text:
            text = text.replace("{m}", g.mask(t))
        if text.endswith(")") and "=" not in template and g.choose(5) == 4:
            return f"{g.new()} = {text}"
        return text

    return make
