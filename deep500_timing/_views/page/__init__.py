"""``report.html``: a run on one page that works offline. And its charts as files.

``_section`` defines a section, ``_context`` the data that it reads, ``_page`` the page. Each built-in section is a
module. Other distributions register sections as entry points ``deep500_timing.sections``, or
``deep500_timing.table_sections`` for runs with a certain table.
"""
