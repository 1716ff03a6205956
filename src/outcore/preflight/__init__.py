"""preflight: estimate a training step before it runs, or after it ran out of memory.

target    -> Step      what a script wants to train
step      -> Trace     without running it
forecast  -> Forecast  in-core and under a plan, predicted
watch, out_of_memory   the same for a plain script that ran out of memory
"""
