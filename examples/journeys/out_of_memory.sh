# The researcher: "It ran out of memory. What would fit?"

# 5 GB for the process stand for a device that is too small. The script is run unchanged.
(ulimit -v 5000000 && outcore run train_large.py 2>&1 | sed -n '/^outcore: /,$p') || echo "exit code $?"

# The same question before anything is run; no memory is taken for it.
outcore estimate train_large.py:step --hardware titan-xp --budget 4GiB

# Fewer rows, to be quick: 550 MiB a step, trained inside 200 MiB.
python train_large.py --rows 65536 --budget 200MiB
