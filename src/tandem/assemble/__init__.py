"""From a recipe to objects: the only room that knows every adapter.

    Recipe -> model.py: Model (decoder, tokenizer, renderer) -> rollout.py: Rollout (engine, agent, rewards)
                                                             -> phases.py: Phase (source, plan, learner, ...) for the loop

A phase is one run of the loop: an optional warm-up on demonstrations, then the main one. What happens around the loop
(directories, snapshots, evaluation, reports) is launch.py's.
"""
