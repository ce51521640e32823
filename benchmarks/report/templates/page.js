"use strict";
// A click on a column's head sorts its table: numbers from the highest, texts from A; then reversed.
for (const table of document.querySelectorAll("table:not(.samples)")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
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
