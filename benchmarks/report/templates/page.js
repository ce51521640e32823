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
// While the suite is computed: a page from a file is read again now and then, a served one asks how
// far it is, and is read again when there are new tables.
const progress = document.getElementById("progress");
const ask = async () => {
  try {
    const answer = await fetch("progress");
    if (!answer.ok) throw new Error(answer.status);
    if (answer.headers.get("Report-At") !== progress.dataset.at) return location.reload();
    progress.innerHTML = await answer.text();
    document.title = document.title.replace(/^\S+/, progress.querySelector(".share").textContent);
    progress.className = "";
  } catch {
    progress.className = "lost";
  }
  setTimeout(ask, 2000);
};
if (progress && location.protocol === "file:") setTimeout(() => location.reload(), 30000);
else if (progress) ask();
