"use strict";
// A click on a column's head sorts its table: numbers from the highest, texts from A; then reversed.
for (const table of document.querySelectorAll("table:not(.samples)")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const key = (row) => {
        const cell = row.cells[column];
        return "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent.trim();
      };
      const rows = [...body.rows];
      const numeric = rows.some((row) => typeof key(row) === "number");
      const order = head.getAttribute("aria-sort");
      const sign = order === (numeric ? "descending" : "ascending") ? -1 : 1;
      rows.sort((a, b) => {
        const x = key(a), y = key(b);
        if (!numeric) return sign * x.localeCompare(y);
        if (typeof x !== "number" || typeof y !== "number")  // what is missing comes last
          return (typeof x !== "number") - (typeof y !== "number");
        return sign * (y - x);
      });
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", (sign > 0) === numeric ? "descending" : "ascending");
      body.append(...rows);
    });
  });
}

// A filter box keeps the rows that contain each of its words, alone or with their headings.
const rows = [...document.querySelectorAll("table:not(.samples) tbody tr")];
const parts = [...document.querySelectorAll("section, .row")].filter((e) => e.querySelector("tr"));
if (rows.length) {
  const box = document.createElement("p"), input = document.createElement("input");
  const shown = document.createElement("output");
  box.className = "filter";
  input.type = "search";
  input.placeholder = "Filter the rows of all tables";
  input.setAttribute("aria-label", input.placeholder);
  box.append(input, shown);
  document.querySelector("h1").after(box);
  const text = (row) => [row, row.closest(".row")?.querySelector("h4"),
    row.closest("section")?.querySelector("h2")].map((e) => e?.textContent ?? "").join(" ");
  const texts = rows.map((row) => text(row).toLowerCase());
  const filter = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    rows.forEach((row, i) => { row.hidden = !words.every((word) => texts[i].includes(word)); });
    for (const part of parts) {
      const own = [...part.querySelectorAll("table:not(.samples) tbody tr")];
      part.hidden = words.length > 0 && own.every((row) => row.hidden);
    }
    const left = rows.filter((row) => !row.hidden).length;
    shown.value = words.length ? `${left} of ${rows.length} rows` : "";
  };
  // The page of a running suite loads itself again.
  try { input.value = sessionStorage.getItem("filter") ?? ""; } catch { /* no storage here */ }
  input.addEventListener("input", () => {
    try { sessionStorage.setItem("filter", input.value); } catch { /* no storage here */ }
    filter();
  });
  filter();
}
