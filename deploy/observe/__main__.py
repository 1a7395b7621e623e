"""`python -m deploy.observe`: write the dashboards of `dashboards.py` to `grafana/dashboards`."""

from pathlib import Path

from deploy.observe.dashboards import ALL

FOLDER = Path(__file__).parent / "grafana" / "dashboards"


def main() -> None:
    for one in ALL:
        path = FOLDER / f"{one.uid}.json"
        path.write_bytes(one.as_json())
        print(path)


if __name__ == "__main__":
    main()
