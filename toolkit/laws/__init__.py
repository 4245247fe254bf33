"""Laws of time of a forward pass: one list of features, and one object that is fitted, stored in
fit.json, and evaluated by the simulator. The fits are in `toolkit.estimators`.
"""
