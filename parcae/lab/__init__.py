"""Small experiments on loop models: text and tasks, models that a CPU trains in a minute.

`data` (characters of Python's help topics), `models` (tiny loop models of any layout), `tasks` (a
task that needs depth).
"""
