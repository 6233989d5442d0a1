"""The grader: plain pytest files in `exercises/tests`, run on a learner's file.

A test file uses four names::

    from minifer.course.grading import compare, points, probe, unchanged

    @points("4.1", 2)                      # exercise, points; hidden=True: not run by check()
    def test_ex04_1_slots_follow_the_table(target, rng):
        ...

`target` is the learner's namespace; `rng`, a `random.Random`, and `generator`, a `torch.Generator`,
have a fresh seed that the report names.
"""

from minifer.course.grading.compare import compare, unchanged
from minifer.course.grading.marks import points, probe

__all__ = ["compare", "points", "probe", "unchanged"]
