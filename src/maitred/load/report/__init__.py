"""Reports: result files as Markdown and as one HTML file, for people.

::

    quantity    a number  ->  text for readers: three digits and a unit
    document    parts of a report: notes, tables and plots, in sections
    judgement   a result  ->  the verdict, and what limits it
    canvas      a figure  ->  SVG that fits into a page; the only module that uses matplotlib
    over_time, spread         a result  ->  one figure: values over time, or their distribution
    outline     a result  ->  a document, and all its figures
    comparison, sweep         documents and figures of comparisons and sweeps
    markdown, html   a document  ->  text

The content is decided once, in the document; the two renderers are independent of load tests.
"""
