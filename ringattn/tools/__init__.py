"""Commands and checks that stand on the library: doctor, planner, check."""
