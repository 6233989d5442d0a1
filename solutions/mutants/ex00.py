"""Known mistakes of exercises 00."""

from minifer.course.grading.mutants import Mutant

MUTANTS = [
    Mutant(
        "ex00_1_m1_last_chunk_forgotten",
        "0.1",
        old="event.step <= drawn[0].step",
        new="event.step < drawn[0].step",
        diagnosis="the step that draws the first token also computes the end of the prompt: "
        "it counts as prefill",
        killed_by="test_ex00_1_agrees_with_the_engine",
    ),
]
