// Draws the panels of dashboard.json with Grafana's own components, from what a Prometheus answered to their queries.
// Owns nothing but what Grafana's server would add: the queries' answers as frames, and the defaults of its panels.
// docs/take_dashboard.py bundles it, writes `window.SCENE`, and reads `data-undrawn` of the root element.
import { createRoot } from "react-dom/client";
import { BigValue, BigValueColorMode, BigValueGraphMode, GlobalStyles, PanelChrome, TimeSeries } from "@grafana/ui";
import { ThemeContext, FieldType, createTheme, dateTime, getDisplayProcessor, toDataFrame } from "@grafana/data";

const { panels, answers, start, end, width, row } = window.SCENE;
const theme = createTheme({ colors: { mode: "dark" } });
const timeRange = { from: dateTime(start * 1000), to: dateTime(end * 1000), raw: { from: "", to: "" } };
const column = width / 24;
const GAP = 8;

const named = (legend, labels) => legend.replace(/\{\{\s*(\w+)\s*\}\}/g, (_, label) => labels[label] ?? "");

// One frame per series, with what Grafana sets by default for the two kinds of panels.
function frames(panel) {
  const series = answers[panel.id].flatMap((found, at) =>
    found.map(({ metric, values }) => ({ values, name: named(panel.targets[at].legendFormat, metric) })),
  );
  return series.map(({ values, name }, seriesIndex) => {
    const color = { mode: panel.type === "stat" ? "fixed" : "palette-classic", fixedColor: "green" };
    const config = { ...panel.fieldConfig.defaults, color, displayName: name, custom: { lineWidth: 1, spanNulls: true } };
    const frame = toDataFrame({
      fields: [
        { name: "Time", type: FieldType.time, config: {}, values: values.map(([at]) => at * 1000) },
        // A quotient of rates is NaN while nothing happens.
        { name: "Value", type: FieldType.number, config, values: values.map(([, v]) => (v === "NaN" ? null : Number(v))) },
      ],
    });
    for (const field of frame.fields) {
      field.state = { seriesIndex };
      field.display = getDisplayProcessor({ field, theme, timeZone: "utc" });
    }
    return frame;
  });
}

function Panel({ panel }) {
  const { x, y, w, h } = panel.gridPos;
  const found = frames(panel);
  const place = { position: "absolute", left: x * column, top: y * row };
  const last = panel.type === "stat" && found[0]?.fields[1];
  return (
    <div style={place}>
      <PanelChrome title={panel.title} width={w * column - GAP} height={h * row - GAP} padding="md">
        {(width, height) => (
          <div id={`panel-${panel.id}`}>
            {last && (
              <BigValue
                {...{ theme, width, height, value: last.display(last.values.at(-1)) }}
                colorMode={BigValueColorMode.Value}
                graphMode={BigValueGraphMode.None}
              />
            )}
            {/* TimeSeries throws without a series, and React then takes all panels away. */}
            {panel.type !== "stat" && found.length > 0 && (
              <TimeSeries
                {...{ theme, width, height, timeRange, frames: found }}
                timeZone="utc"
                legend={{ showLegend: true, displayMode: "list", placement: "bottom", calcs: [] }}
              />
            )}
          </div>
        )}
      </PanelChrome>
    </div>
  );
}

createRoot(document.getElementById("root")).render(
  <ThemeContext.Provider value={theme}>
    <GlobalStyles />
    {panels.map((panel) => (
      <Panel key={panel.id} panel={panel} />
    ))}
  </ThemeContext.Provider>,
);

// Series have colours; the grid, the axes and their labels are grey.
function hasColour(canvas) {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  for (let at = 0; at < data.length; at += 4) {
    const [red, green, blue, alpha] = data.subarray(at, at + 4);
    if (alpha > 128 && Math.max(red, green, blue) - Math.min(red, green, blue) > 40) return true;
  }
  return false;
}

function isDrawn(panel) {
  const place = document.getElementById(`panel-${panel.id}`);
  if (panel.type === "stat") return /\d/.test(place?.textContent ?? "");
  return [...(place?.querySelectorAll("canvas") ?? [])].some((canvas) => canvas.width > 0 && hasColour(canvas));
}

setInterval(() => {
  const undrawn = panels.filter((panel) => !isDrawn(panel)).map((panel) => panel.title);
  document.documentElement.dataset.undrawn = undrawn.join(", ");
}, 500);
