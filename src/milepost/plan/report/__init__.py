"""A plan as one page that needs no network. In: a `Plan`. Out: HTML.

The law kept here: every curve is drawn from the functions that the plan itself uses; its numbers stand in a table beneath.
"""

from milepost.plan.report.page import page

__all__ = ["page"]
