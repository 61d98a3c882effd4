"""Pages for a browser: one HTML file each, which needs no network.

`html` in `render.py` makes one: `page.html` is its template, and `page.css` and the scripts
go into it. What is on top is plain HTML; from the data, as JSON, the scripts make everything that
can be clicked. Pages come from two sources: a plan, and the report of a `diagnose`
(`mpcompile/diagnosis/report.py`), which is the plan of its graphs with the numbers of their nodes.
"""
