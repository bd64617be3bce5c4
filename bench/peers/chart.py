"""Draws the results of peers.py on one thread as bars: chart.py results.json > docs/speed.svg"""

import json
import sys
import textwrap
from html import escape

# Rapt stands out; the peers' tones are muted, but apart from each other on white and on black.
SERIES = {"rapt": ("Rapt", "#e8590c"), "pytorch": ("PyTorch", "#8896a5"), "onnxruntime": ("ONNX Runtime", "#6c8ebf"),
          "openvino": ("OpenVINO", "#a48fc0"), "onednn": ("oneDNN", "#6fa8a0"), "jax": ("JAX", "#c2a76b")}
CEILING = "openblas"  # the products without the softmax: a line across the peers
LEFT, TOP, HEIGHT, BAR, GAP = 44, 84, 230, 8.5, 13
GROUP = len(SERIES) * BAR + GAP
STYLE = """
text { font: 10px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #6e7781 }
.title { font-size: 15px; font-weight: 600; fill: #4d5660 }
.legend { font-size: 11.5px }
.name { font-size: 12px; font-weight: 600; fill: #4d5660 }
.rapt { font-size: 10.5px; font-weight: 700; fill: #e8590c }
.grid { stroke: #8c959f; stroke-opacity: .35 }
.ceiling { stroke: #4d5660; stroke-width: 1.5; stroke-dasharray: 3 2 }
@media (prefers-color-scheme: dark) {
text { fill: #9198a1 } .title, .name { fill: #f0f6fc } .ceiling { stroke: #f0f6fc }
}"""


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def rectangle(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'


def line(x: float, y: float, width: float, kind: str) -> str:
    return f'<path d="M{x:.1f} {y:.1f}h{width:.1f}" class="{kind}"/>'


def legend(names: set[str]) -> list[str]:
    parts, x = [], LEFT
    for name, (title, colour) in SERIES.items():
        if name in names:
            parts += [rectangle(x, TOP - 45, 11, 11, colour), text(x + 16, TOP - 35, title, "legend")]
            x += 36 + 7 * len(title)
    if CEILING in names:
        parts += [line(x, TOP - 39, 18, "ceiling"), text(x + 23, TOP - 35, "OpenBLAS, products alone", "legend")]
    return parts


def group(result: dict, x: float) -> list[str]:
    def y(share: float) -> float:
        return TOP + HEIGHT * (1 - share)

    times, middle, parts = result["times"], x + (GROUP - GAP) / 2, []
    for i, (name, (_, colour)) in enumerate(SERIES.items()):
        if name in times:
            share = times[name]["share"]
            parts.append(rectangle(x + i * BAR, y(share), BAR - 1, HEIGHT * share, colour))
            if name == "rapt":
                parts.append(text(x + BAR - 1, y(share) - 4, f"{100 * share:.0f}", "rapt", "end"))
    if CEILING in times:
        parts.append(line(x + BAR, y(times[CEILING]["share"]), GROUP - GAP - BAR + 2, "ceiling"))
    parts.append(text(middle, TOP + HEIGHT + 17, result["name"], "name", "middle"))
    words = result["words"].removeprefix("the same, ").removeprefix("N1 ").replace(",", "")
    for i, part in enumerate(textwrap.wrap(words, 10)):
        parts.append(text(middle, TOP + HEIGHT + 31 + 12 * i, part, "", "middle"))
    return parts


def main() -> None:
    report = json.load(open(sys.argv[1]))
    results = [result for result in report["results"] if result["threads"] == 1]
    width, height = LEFT + GROUP * len(results) + 8, TOP + HEIGHT + 110
    isa = {"avx2": "AVX2", "avx512": "AVX-512", "neon": "NEON"}.get(report["rapt"]["isa"], report["rapt"]["isa"])
    parts = [text(LEFT, 22, "Attention in f32 on one thread, as a share of what the machine can do (percent)", "title"),
             *legend({"rapt", *report["versions"]})]
    for percent in range(0, 101, 20):
        y = TOP + HEIGHT * (1 - percent / 100)
        parts += [line(LEFT, y, width - LEFT - 8, "grid"), text(LEFT - 7, y + 3.5, str(percent), "", "end")]
    for i, result in enumerate(results):
        parts += group(result, LEFT + GAP / 2 + i * GROUP)
    names = {name: title for name, (title, _) in SERIES.items()} | {CEILING: "OpenBLAS"}
    versions = ", ".join(f"{names[name]} {version}" for name, version in report["versions"].items() if name in names)
    limits = "Of the multiply-add peak; D1 and D2 of the rate of reading memory. Causal counts half the operations."
    parts += [text(LEFT, height - 26, f"{limits} Each library with its best operator and layout."),
              text(LEFT, height - 11, f"{report['cpu']}; Rapt {report['rapt']['version']} with {isa}, {versions}.")]
    size = f'viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" height="{height}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<style>{STYLE}\n</style>'
    print(opening, *parts, "</svg>", sep="\n")


main()
