"""Reports: a result file told to people, as Markdown and as one HTML file.

::

    quantity    a number  ->  what a reader sees: three digits and a unit
    document    what a report is made of: notes, tables, plots, in sections
    judgement   a result  ->  the verdict, and what limits it
    outline     a result  ->  a document
    canvas      a figure  ->  SVG that sits well in a page; the one door to matplotlib
    over_time, spread         a result  ->  one figure: along the run, or of who got what
    plots       a result  ->  all its figures
    comparison, sweep         the documents and figures of these
    markdown, html   a document  ->  text

The content is decided once, in the document; the two renderers know nothing of load tests.
"""
