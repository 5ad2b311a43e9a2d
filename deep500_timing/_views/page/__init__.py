"""``report.html``: a run on one page that works offline. And its charts as files.

``_section`` says what a section is, ``_context`` what it may read, ``_page`` puts them together. Each section is a
module of its own; those of other distributions come by the entry points ``deep500_timing.sections``, and for
runs with a table of theirs ``deep500_timing.table_sections``.
"""
