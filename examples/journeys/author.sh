# The author of a paper: "How does my policy compare, on their networks and machines?"

export PYTHONPATH="$PWD/my_policy"

# A policy of one's own is listed beside those of the papers.
outcore policies | grep largest-first

# The same network, machine and budget for all; the time that none can beat below.
outcore compare --network alexnet --batch 512 --hardware v100-pcie3 --budget 5GiB --budget 4GiB \
    --policies largest-first,swap-all,superneurons,pooch,search

# Where the time and the memory of one plan go, as a page to look at.
outcore report --network alexnet --batch 512 --hardware v100-pcie3 --budget 4GiB --policy largest-first --html page.html
