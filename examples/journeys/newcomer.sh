# The newcomer: "It should take less memory. What do I change?"

# One line, and one to see what became of it.
diff train.py train_budgeted.py || true

# The same losses to the last digit, inside 24 MiB of the 34 MiB that the step takes otherwise.
python train.py
python train_budgeted.py
