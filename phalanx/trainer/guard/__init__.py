"""What watches over the numbers of a run: spikes, silent corruption, stragglers.

Every verdict is reached on values that all ranks have reduced, so that all reach the same.
"""
