"""Pages for a browser: one HTML file each, which needs no network.

`app.py` makes the file of a `Page`: `page.html` is its template, and `page.css` and the scripts go
into it. What is on top is plain HTML; from the data, as JSON, the scripts make everything that can
be clicked. Pages come from two sources: a plan (`of_plan.py`), and the report of a
`diagnose` (`mpcompile/diagnosis/report_page.py`), which is the plan of its graphs with the numbers
of their nodes.
"""
