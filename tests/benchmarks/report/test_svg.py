"""Shorter SVG files show the same."""

import re
from xml.etree import ElementTree

from benchmarks.report.svg import compact

SVG = """<svg xmlns="http://www.w3.org/2000/svg">
 <defs>
  <style type="text/css">*{stroke-linejoin: round; stroke-linecap: butt}</style>
 </defs>
 <g id="figure_1">
  <g id="line_1" clip-path="url(#p1)">
   <path id="m1" d="M 1.26 2
L 3.049 4.96
z" style="fill: red"/>
   <path d="M 0 0 C 1 2 3 4 5 6 L 7 8" style="fill: red"/>
  </g>
  <text style="font-size: 9px" x="1.987654" y="2" transform="rotate(-0 1 2)">0.123 style="y"</text>
 </g>
 <clipPath id="p1"/>
</svg>
"""


def test_only_what_nothing_depends_on_is_left_out():
    text = compact(SVG)
    root = ElementTree.fromstring(text)
    name = re.search(r"\.(\w+)\{fill: red\}</style>", text)[1]
    assert [path.get("class") for path in root.iter() if path.tag.endswith("path")] == [name] * 2
    assert 'd="M1.2 2 3.0 4.9z"' in text and 'd="M0 0C1 2 3 4 5 6L7 8"' in text
    assert '<text style="font-size: 9px" x="1.9" y="2">0.123 style="y"</text>' in text
    assert text.count("<g") == 1 and '<g clip-path="url(#p1)">' in text and 'id="p1"' in text
    assert len(text) < 0.8 * len(SVG)
