"""Your own arrays in five lines: split over ten clients, trained, evaluated, written to runs/."""

from sklearn.datasets import load_wine

import fedloom

x, y = load_wine(return_X_y=True)
x = (x - x.mean(0)) / x.std(0)
run = fedloom.run(data=(x, y), method="fedprox", stream={"kind": "static"}, training={"rounds": 20, "batch_size": 8})
print(f"accuracy {run.summary['final_accuracy']:.3f}, first predictions {run.predict(x[:5])}, report in {run.folder}")
