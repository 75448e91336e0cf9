"""The mutation check of `tandem.algos`: small faults are put in one by one, and the tests of the arithmetic must find them."""
