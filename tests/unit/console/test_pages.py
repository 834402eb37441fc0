"""The files that come with the package: whole, and nothing in them asks anybody else."""

import re

from maitred.console.pages import pages

PAGES = pages()


def test_everything_that_is_named_is_there():
    named = set()
    for name, page in PAGES.items():
        text = page.body.decode()
        named |= set(re.findall(r'(?:src|href)="/console/([^"]+)"', text))
        named |= set(re.findall(r'from "/console/([^"]+)"', text))
        if "/" not in name:
            named |= {path.removeprefix("./") for path in re.findall(r'from "(\./[^"]+)"', text)}
    assert named <= PAGES.keys()
    assert {"index.html", "main.js", "console.css", "vendor/uplot.js"} <= named | {"index.html"}


def test_nothing_comes_from_elsewhere_and_nothing_is_inline():
    for name, page in PAGES.items():
        text = page.body.decode().replace("http://www.w3.org/2000/svg", "")
        forbidden = r"innerHTML|\beval\(|new Function" + ("" if name.startswith("vendor/") else "|https?://")
        assert re.findall(forbidden, text) == [], name
    index = PAGES["index.html"].body.decode()
    assert not re.search(r"<style|style=|\son\w+=|<script(?![^>]*\ssrc=)", index)


def test_licences_lie_beside_what_is_not_ours_and_are_not_served():
    assert not [name for name in PAGES if "LICENSE" in name]


def test_a_tag_tells_one_content_from_another(tmp_path):
    (tmp_path / "a.js").write_text("1")
    first = pages(tmp_path)["a.js"]
    (tmp_path / "a.js").write_text("2")
    (tmp_path / "notes.txt").write_text("no")
    again = pages(tmp_path)
    assert again.keys() == {"a.js"}
    assert again["a.js"].tag != first.tag
    assert again["a.js"].content_type.startswith("text/javascript")
