"""Built-in tasks, a file each: problems with one verifiable answer that a tiny model can learn.

A problem names what is asked, what is right and how it is solved; `builtin.py` makes datasets of it. `TASKS` is the
registry's table of them.
"""

TASKS = {
    "arithmetic": "tandem.data.tasks.arithmetic:Arithmetic",
    "sorting": "tandem.data.tasks.sorting:Sorting",
    "countdown": "tandem.data.tasks.countdown:Countdown",
    "calculator": "tandem.data.tasks.calculator:Calculator",
    "largest": "tandem.data.tasks.largest:Largest",
}
