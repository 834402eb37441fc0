"""Writes docs/vocabulary.txt: every word that the name of a class or a module has, one a line."""

from pathlib import Path

from tests.support.source import names, words


def main() -> None:
    """Writes the page anew; a reviewer sees in its difference which words came and went."""
    used = sorted({word for _, kind, name in names() if kind in ("class", "module") for word in words(name)})
    page = Path(__file__).parent.parent / "docs" / "vocabulary.txt"
    page.write_text("\n".join(used) + "\n", encoding="utf-8")
    print(f"{len(used)} words in {page}")


if __name__ == "__main__":
    main()
