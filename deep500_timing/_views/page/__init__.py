"""``report.html``: a run on one page that works offline. And its charts as files.

``_section`` defines a section and the data that it reads, ``_charts`` what sections draw, ``_page`` the page. The other
modules are the built-in sections. Other distributions register sections as entry points ``deep500_timing.sections``,
or ``deep500_timing.table_sections`` for runs with a certain table.
"""
