"""Reports: a result file told to people, as Markdown and as one HTML file.

::

    quantity    a number  ->  what a reader sees: three digits and a unit
    document    what a report is made of: notes, tables, plots, in sections
    outline     a result  ->  a document; likewise `comparison` and `sweep`
    canvas      a figure  ->  SVG that sits well in a page; the only module that needs matplotlib, with `plots`
    plots       a result  ->  its figures
    markdown, html   a document  ->  text

The content is decided once, in the document; the two renderers know nothing of load tests.
"""
