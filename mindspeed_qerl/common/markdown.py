"""Tables in Markdown."""

from collections.abc import Iterable


def markdown_table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """The lines of a table.

    >>> markdown_table(("a", "b"), [("1|2", "3")])
    ['| a | b |', '| --- | --- |', '| 1\\\\|2 | 3 |']
    """
    table = []
    for row in (header, *rows):
        cells = [cell.replace("|", "\\|").replace("\n", "<br>") for cell in row]
        table.append(f"| {' | '.join(cells)} |")
    table.insert(1, f"| {' | '.join(['---'] * len(cells))} |")
    return table
