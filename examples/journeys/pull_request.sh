# The infrastructure engineer: "What changes for training if we merge this?"

step="--network two-heads --batch 8 --hardware titan-xp"

# The plan that is in the repository, and what it comes to.
outcore plan make $step --budget 120MiB --policy pooch --output plan.json
outcore plan show plan.json --top 3

# Somebody proposes a rule; the plan is made anew, and the difference goes into the review.
outcore plan make $step --budget 120MiB --policy pooch --overrides overrides.json --output new.json
outcore plan diff plan.json new.json --actions || echo "exit code $?"

# What a check of the pull request runs: exit code 0 for this step on this machine, 1 for another.
outcore plan check new.json $step --strict
outcore plan check new.json --network two-heads --batch 16 --hardware titan-xp 2>&1 || echo "exit code $?"
